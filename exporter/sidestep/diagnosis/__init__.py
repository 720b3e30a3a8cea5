"""What is wrong with an installation, as findings with stable codes."""
