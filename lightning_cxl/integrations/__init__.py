"""The other front ends, one file for each framework: Fabric, Accelerate, the Trainer of transformers."""
