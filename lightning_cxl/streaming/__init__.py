"""What visits the device: units, their weights, their inputs."""
