"""Many machines: Redis carries the messages, PostgreSQL keeps the rows. Only the set-up differs from one SQLite file.

export SHOP_REDIS=redis://localhost:6379/0 SHOP_DATABASE=postgresql://localhost/shop
export DRAMATIQ_SAGA__SCHEMA__AUTO_CREATE=true    # on servers tables are made only where this is allowed
dramatiq examples.two_machines.app                # on every machine
python -m examples.two_machines order-42          # starts a run and waits for it
"""
