DROP TABLE IF EXISTS feed_positions;
DROP TABLE IF EXISTS paid_orders;
