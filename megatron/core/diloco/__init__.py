"""DiLoCo: workers that train apart, and the outer steps in which they meet (arXiv:2311.08105, arXiv:2501.18512)."""
