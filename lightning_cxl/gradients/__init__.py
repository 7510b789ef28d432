"""The life of a gradient: from the device, through sums and checks, to the optimizer."""
