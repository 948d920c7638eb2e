"""One machine, one command: compose trainer, servers and workers as processes, watch them, sum the run up."""
