"""What moves during forward and backward: units and their offloaded activations."""
