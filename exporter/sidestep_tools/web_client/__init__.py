"""HTTP requests of the command line's tools: access as curl has it, answers of bounded size."""
