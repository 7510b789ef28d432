"""Fine-tune language models far larger than the GPU from host memory tiers: DRAM, CXL memory, NVMe."""
