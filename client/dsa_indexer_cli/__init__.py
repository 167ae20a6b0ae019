"""The command `dsa-indexer`. May import everything; nothing imports it."""
