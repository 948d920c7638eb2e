"""One file a command. Module level imports stay light, so that --help and config errors are instant."""
