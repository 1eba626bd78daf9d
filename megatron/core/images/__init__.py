"""Pictures from files: decoded, cut into tiles, and where they lie. No torch, so that every process may read them."""
