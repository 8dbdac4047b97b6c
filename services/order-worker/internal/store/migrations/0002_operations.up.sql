CREATE TABLE IF NOT EXISTS dead_letters (
  id           BIGINT       NOT NULL AUTO_INCREMENT,
  dedupe_key   VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- one row per message and order, whatever comes how often
  message_id   VARCHAR(255) NOT NULL,
  routing_key  VARCHAR(64)  NOT NULL,
  source_queue VARCHAR(64)  NOT NULL,
  class        VARCHAR(32)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  error        VARCHAR(1000) NOT NULL,
  attempt      INT          NOT NULL,
  activity_id  VARCHAR(32)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- empty when unknown
  order_id     VARCHAR(64)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- empty when unknown
  body         MEDIUMBLOB   NOT NULL,
  headers      TEXT         NOT NULL,                                        -- JSON object
  state        VARCHAR(10)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- open, claimed, sent, resolved, discarded
  parked       TINYINT(1)   NOT NULL DEFAULT 0,
  occurrences  INT          NOT NULL DEFAULT 1,
  job_id       VARCHAR(26)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
  note         VARCHAR(500) NOT NULL DEFAULT '',
  published_at DATETIME(6)  NULL,
  created_at   DATETIME(6)  NOT NULL,
  updated_at   DATETIME(6)  NOT NULL,
  PRIMARY KEY (id),
  UNIQUE KEY dead_letters_dedupe (dedupe_key),
  KEY dead_letters_order (order_id),
  KEY dead_letters_state (state, class)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS replay_jobs (
  id           VARCHAR(26)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  kind         VARCHAR(8)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- replay, discard
  state        VARCHAR(8)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- running, done
  filter       TEXT         NOT NULL,
  reason       VARCHAR(200) NOT NULL,
  requested_by VARCHAR(64)  NOT NULL,
  total        INT          NOT NULL DEFAULT 0,
  sent         INT          NOT NULL DEFAULT 0,
  skipped      INT          NOT NULL DEFAULT 0,
  failed       INT          NOT NULL DEFAULT 0,
  created_at   DATETIME(6)  NOT NULL,
  updated_at   DATETIME(6)  NOT NULL,
  finished_at  DATETIME(6)  NULL,
  PRIMARY KEY (id),
  KEY replay_jobs_state (state, updated_at)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS replay_items (
  job_id     VARCHAR(26)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  letter_id  BIGINT       NOT NULL,
  state      VARCHAR(10)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- claimed, sent, skipped, failed
  verdict    VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  error      VARCHAR(500) NOT NULL DEFAULT '',
  updated_at DATETIME(6)  NOT NULL,
  PRIMARY KEY (job_id, letter_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS operator_audit (
  id      BIGINT       NOT NULL AUTO_INCREMENT,
  at      DATETIME(6)  NOT NULL,
  actor   VARCHAR(64)  NOT NULL,
  role    VARCHAR(16)  NOT NULL,
  action  VARCHAR(64)  NOT NULL,
  subject VARCHAR(128) NOT NULL,
  reason  VARCHAR(200) NOT NULL DEFAULT '',
  result  VARCHAR(32)  NOT NULL DEFAULT '',
  detail  TEXT         NOT NULL,
  remote  VARCHAR(64)  NOT NULL DEFAULT '',
  PRIMARY KEY (id),
  KEY operator_audit_subject (subject, id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
