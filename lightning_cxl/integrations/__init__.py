"""Front ends, one file for each framework: Lightning, Fabric, Accelerate, the Trainer of transformers."""
