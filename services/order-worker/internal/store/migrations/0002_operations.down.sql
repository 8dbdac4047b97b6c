DROP TABLE IF EXISTS replay_items;
DROP TABLE IF EXISTS replay_jobs;
DROP TABLE IF EXISTS operator_audit;
DROP TABLE IF EXISTS dead_letters;
