"""The demo: the whole system on one recorded step of vLLM, checked at every stage."""
