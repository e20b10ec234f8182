-- An in-memory database: fill, index, join, update, delete, aggregate. ROWS is replaced by the test.
.bail on
CREATE TABLE item (id INTEGER PRIMARY KEY, kind INTEGER, name TEXT, amount INTEGER);
INSERT INTO item SELECT value, (value * 7919) % 1000, printf('item %08d of kind %d', (value * 48271) % 2147483647, value % 97), (value * 31) % 10007
  FROM generate_series(1, ROWS);
CREATE INDEX item_name ON item (name);
CREATE INDEX item_kind ON item (kind, amount);
SELECT count(*), sum(amount), min(name), max(name) FROM item;
CREATE TABLE total AS SELECT kind, count(*) AS n, sum(amount) AS s FROM item GROUP BY kind;
SELECT sum(n), sum(s), max(s) FROM total;
SELECT i.kind, count(*), max(i.name) FROM item i JOIN total t ON t.kind = i.kind WHERE i.amount > t.s / t.n GROUP BY i.kind ORDER BY i.kind LIMIT 20;
UPDATE item SET amount = amount + 1, name = name || ' updated' WHERE id % 3 = 0;
DELETE FROM item WHERE id % 7 = 0;
SELECT count(*), sum(amount), sum(length(name)) FROM item;
SELECT name FROM item ORDER BY name DESC LIMIT 5;
SELECT name FROM item ORDER BY amount, name LIMIT 5;
VACUUM;
PRAGMA integrity_check;
