"""Memory that devices may touch: the pool's arena, engines' regions, and the kernels that move bytes between slices."""
