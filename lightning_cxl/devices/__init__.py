"""Device types: which there are, and how host memory is registered with their driver."""
