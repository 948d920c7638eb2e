"""One machine, one command: start trainer, servers and workers, watch them, and summarise the run."""
