"""The life of a gradient: from the device, through sums and checks, to the step of an adopted optimizer."""
