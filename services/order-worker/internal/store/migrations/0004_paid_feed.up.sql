-- Orders that were paid, for fulfilment. A row is written in the payment's own transaction, without a
-- position; positions are given to committed rows only, under the lock of the counter, so that no
-- order can become visible behind a reader's cursor.
CREATE TABLE IF NOT EXISTS paid_orders (
  order_id VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  paid_at  DATETIME(6) NOT NULL,
  position BIGINT      NULL,
  PRIMARY KEY (order_id),
  UNIQUE KEY paid_orders_position (position),
  KEY paid_orders_waiting (position, paid_at)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS feed_positions (
  feed VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  last BIGINT      NOT NULL,
  PRIMARY KEY (feed)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

INSERT IGNORE INTO feed_positions (feed, last) VALUES ('paid', 0);

INSERT IGNORE INTO paid_orders (order_id, paid_at)
  SELECT o.id, o.updated_at FROM orders o JOIN activities a ON a.id = o.activity_id WHERE o.status = 'paid' AND a.shadow = 0;
