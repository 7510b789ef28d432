"""Units: their weights on the device while they compute, and their inputs on the host until backward."""
