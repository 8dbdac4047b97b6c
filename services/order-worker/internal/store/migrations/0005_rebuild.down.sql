DROP TABLE IF EXISTS rebuild_barriers;
DROP TABLE IF EXISTS rebuilds;
