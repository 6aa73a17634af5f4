"""Experts on several ranks: processes that share a worker's MoE layers over torch.distributed.

Rank 0 is the engine; it holds attention, the router and its part of the experts. Every rank holds the experts that the
placement gives it. For each MoE layer rows go to the ranks of their experts and come back (all-to-all, twice), and
between steps experts' weights move to where the load is.
"""
