"""Operations on the memory of devices (GPUs), on communicators of their own."""
