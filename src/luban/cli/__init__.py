"""The command line: `main` dispatches, one module a command."""
