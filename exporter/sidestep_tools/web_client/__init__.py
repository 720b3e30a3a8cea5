"""HTTP requests of the commands: access with curl's options, answers of bounded size."""
