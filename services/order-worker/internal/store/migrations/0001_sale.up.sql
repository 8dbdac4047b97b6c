-- Every statement can be run again: MySQL commits each DDL statement by itself, so a migration that
-- was killed half-way is repeated from its start.

CREATE TABLE IF NOT EXISTS activities (
  id                VARCHAR(32)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  name              VARCHAR(200) NOT NULL,
  state             VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- draft, warmed, ended, settled, closed
  starts_at         DATETIME(6)  NOT NULL,
  ends_at           DATETIME(6)  NOT NULL,
  per_user_limit    INT          NOT NULL,
  payment_timeout_s INT          NOT NULL,
  currency          VARCHAR(3)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  qualification     VARCHAR(8)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- none, list
  buckets           INT          NOT NULL,
  region_fallback   TEXT         NOT NULL,                                        -- JSON object of lists
  refund_after_end  VARCHAR(8)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- national, region
  shadow            TINYINT(1)   NOT NULL,
  paused            TINYINT(1)   NOT NULL,
  epoch             BIGINT       NOT NULL,
  warm_number       BIGINT       NOT NULL,  -- the last warm-up attempt's number
  warm_winner       BIGINT       NOT NULL,  -- the attempt whose stock is sold; 0 before
  fencing           BIGINT       NOT NULL,  -- raised by each settlement that takes the lock
  created_by        VARCHAR(64)  NOT NULL,
  created_at        DATETIME(6)  NOT NULL,
  updated_at        DATETIME(6)  NOT NULL,
  warmed_at         DATETIME(6)  NULL,
  ended_at          DATETIME(6)  NULL,      -- the end was recorded (step 0)
  settled_at        DATETIME(6)  NULL,      -- all pools settled (step 5)
  closed_at         DATETIME(6)  NULL,      -- clean-up done, report final (step 7)
  report            MEDIUMTEXT   NULL,      -- the final report, JSON
  PRIMARY KEY (id),
  KEY activities_state (state, ends_at)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS activity_items (
  activity_id VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  sku_id      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  position    INT         NOT NULL,
  price_minor BIGINT      NOT NULL,
  PRIMARY KEY (activity_id, sku_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- allocated = available + withheld + live + returned, always: each statement that moves available
-- moves one of the others as well. Signed, so that a difference below zero is a value, not error 1690.
CREATE TABLE IF NOT EXISTS activity_stock (
  activity_id VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  sku_id      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  pool        VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  allocated   BIGINT      NOT NULL,
  available   BIGINT      NOT NULL,
  withheld    BIGINT      NOT NULL DEFAULT 0,  -- missing units found by the stock guard
  live        BIGINT      NOT NULL DEFAULT 0,  -- units of pending and paid orders
  returned    BIGINT      NOT NULL DEFAULT 0,  -- units gone back to inventory
  settled_at  DATETIME(6) NULL,
  updated_at  DATETIME(6) NOT NULL,
  PRIMARY KEY (activity_id, sku_id, pool)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS inventory (
  sku_id     VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  pool       VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  on_hand    BIGINT      NOT NULL,
  updated_at DATETIME(6) NOT NULL,
  PRIMARY KEY (sku_id, pool)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- The order id begins with the activity and ends with a ULID: one clustered index serves the look-up
-- by id, the listing of a sale, and appends almost in order.
CREATE TABLE IF NOT EXISTS orders (
  id                VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  activity_id       VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  user_id           VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  sku_id            VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  region            VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  pool              VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  quantity          INT         NOT NULL,
  unit_price_minor  BIGINT      NOT NULL,
  amount_minor      BIGINT      NOT NULL,
  currency          VARCHAR(3)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  status            VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  reason            VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  origin            VARCHAR(12) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- order, tombstone, bare (tombstone without content)
  epoch             BIGINT      NOT NULL,
  payment_timeout_s INT         NOT NULL,
  reserved_at       DATETIME(6) NOT NULL,
  pay_before        DATETIME(6) NOT NULL,
  idem_key          VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  idem_digest       VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  created_at        DATETIME(6) NOT NULL,
  updated_at        DATETIME(6) NOT NULL,
  PRIMARY KEY (id),
  KEY orders_due (status, pay_before)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS payments (
  transaction_id VARCHAR(64)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  order_id       VARCHAR(64)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  amount_minor   BIGINT       NOT NULL,
  currency       VARCHAR(3)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  status         VARCHAR(12)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- kept, applied, refund_due, settled
  reason         VARCHAR(64)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- why it is due: late_payment, second_payment, amount_mismatch, order_lost, order_refunded
  received_at    DATETIME(6)  NOT NULL,
  content        BLOB         NULL,                                            -- the order as the callback knew it (order.reserved, protobuf)
  created_at     DATETIME(6)  NOT NULL,
  updated_at     DATETIME(6)  NOT NULL,
  settled_at     DATETIME(6)  NULL,
  settled_by     VARCHAR(64)  NOT NULL DEFAULT '',
  settle_reason  VARCHAR(200) NOT NULL DEFAULT '',
  PRIMARY KEY (transaction_id),
  KEY payments_order (order_id),
  KEY payments_status (status, updated_at)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Append-only. ref is an order id, or "<activity>/…" for what moves units of a pool, or an operation
-- id. delta is what the operation did to the account: the sum over a pool's rows is its available.
CREATE TABLE IF NOT EXISTS stock_ledger (
  ref         VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  op          VARCHAR(12)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- allocate, add, sell, cancel, refund, withhold, settle
  account     VARCHAR(9)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- sale, inventory
  activity_id VARCHAR(32)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  sku_id      VARCHAR(32)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  pool        VARCHAR(32)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  delta       BIGINT       NOT NULL,
  at          DATETIME(6)  NOT NULL,
  PRIMARY KEY (ref, op, account)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Work that a committed transaction still owes (R3). kind release: subject is an order id, or the
-- name of a batch whose order ids are in detail. The table is empty but for what is in work or stuck,
-- so the sweep scans it and it has no index of its own to keep up to date.
CREATE TABLE IF NOT EXISTS compensations (
  kind        VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- release, refund_due, reconcile
  subject     VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  activity_id VARCHAR(32)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  attempts    INT          NOT NULL DEFAULT 0,
  next_at     DATETIME(6)  NOT NULL,
  last_error  VARCHAR(500) NOT NULL DEFAULT '',
  detail      MEDIUMTEXT   NULL,
  created_at  DATETIME(6)  NOT NULL,
  PRIMARY KEY (kind, subject)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS user_holdings (
  activity_id VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  user_id     VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  held        INT         NOT NULL,
  PRIMARY KEY (activity_id, user_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS qualifications (
  activity_id VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  user_id     VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  PRIMARY KEY (activity_id, user_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
