"""The command. One module a subcommand; `main` is the entry point."""
