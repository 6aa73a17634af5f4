"""What runs next and where: queue, placement, ledger, admission. Pure."""
