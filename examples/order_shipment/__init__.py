"""An order with a child shipment: what it returns, what its failure does, and how one that has completed is undone.

``python -m examples.order_shipment`` runs three orders in one process.
"""
