"""Front ends, a folder for each framework."""
