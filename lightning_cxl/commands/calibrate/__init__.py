"""`calibrate`: how fast memory, devices and disks are."""
