"""``python -m lightning_cxl calibrate``: how fast this machine's memory, devices and disks are."""
