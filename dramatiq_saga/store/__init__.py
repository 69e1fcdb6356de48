"""Rows and transactions. Beside brokers/ and backends/ the only importer of Peewee."""
