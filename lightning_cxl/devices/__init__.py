"""What differs between device types: which devices there are, and how host memory is registered with their driver."""
