"""The indexer service: scores every cached key of a request and selects the k best."""
