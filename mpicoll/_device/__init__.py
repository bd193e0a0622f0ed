"""Operations on the memory of GPUs."""
