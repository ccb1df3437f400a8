"""What CPU kernels take beyond their outputs: ATen's own, MKL's are not counted, oneDNN's."""
