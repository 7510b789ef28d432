"""The other front ends, a file for each framework: Fabric, Accelerate, the Trainer of transformers."""
