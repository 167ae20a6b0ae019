"""One module an engine; `indexer_service.engine` imports the chosen one."""
