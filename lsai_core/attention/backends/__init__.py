"""The attention kernels, one file each: `BACKEND` in it says what the kernel can do and how it is
drawn. Found by looking here."""
