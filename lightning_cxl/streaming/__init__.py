"""Units: their weights on the device while they compute, their inputs on the host until backward."""
