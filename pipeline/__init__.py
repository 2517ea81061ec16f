"""What an RLHF iteration is. Pure: no GPU, no Dask, no SGLang needed to import or test it."""
