"""Every layout computes the model of one rank: losses, gradients, norms and weights, in fp64."""
