"""`bench`: kernels against memory and torch, the SSD tier against fio, pools of host memory."""
