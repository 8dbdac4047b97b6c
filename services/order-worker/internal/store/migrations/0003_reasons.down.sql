UPDATE orders SET reason = 'other' WHERE reason <> CONVERT(CONVERT(reason USING ascii) USING utf8mb4);
ALTER TABLE orders MODIFY reason VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL;
