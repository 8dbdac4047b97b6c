-- Rebuilds of sales after Redis has lost them. One row a sale: the job of the last request.
CREATE TABLE IF NOT EXISTS rebuilds (
  activity_id  VARCHAR(32)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  state        VARCHAR(8)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- running, done, failed
  step         VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- pause, drain, close, write, open
  resume       TINYINT(1)   NOT NULL,                                        -- the sale was not paused before
  token        VARCHAR(26)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,  -- of the attempt under way; barriers carry it
  number       BIGINT       NOT NULL,                                        -- under which it writes Redis; 0 before
  attempts     INT          NOT NULL,
  note         VARCHAR(500) NOT NULL,                                        -- what it waits for, or why it failed
  requested_by VARCHAR(64)  NOT NULL,
  started_at   DATETIME(6)  NOT NULL,
  updated_at   DATETIME(6)  NOT NULL,
  finished_at  DATETIME(6)  NULL,
  read_at      DATETIME(6)  NULL,                                            -- when the rows were read that Redis was written from
  result       MEDIUMTEXT   NULL,                                            -- JSON
  PRIMARY KEY (activity_id),
  KEY rebuilds_state (state)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Which channel has handled everything that it was given before the barrier of a round.
CREATE TABLE IF NOT EXISTS rebuild_barriers (
  token    VARCHAR(26) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  queue    VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  round    INT         NOT NULL,
  consumer VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  at       DATETIME(6) NOT NULL,
  PRIMARY KEY (token, queue, round, consumer),
  KEY rebuild_barriers_at (at)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
