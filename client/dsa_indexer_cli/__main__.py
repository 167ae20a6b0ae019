"""`python -m dsa_indexer_cli`."""

from dsa_indexer_cli.main import app

app()
