"""Files of tensors: formats, read and written in pieces, straight from and to the memory that holds the tensors."""
