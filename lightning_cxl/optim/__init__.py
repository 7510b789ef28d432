"""The update on the host: CPU Adam and its kernels, master weights, gradients."""
