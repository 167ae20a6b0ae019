"""The vLLM plugin: a sparse attention backend and an indexer op that asks the service."""
