-- Reasons of the system are codes, but one may come in a message of another program, in any language.
-- In an ascii column such a text is an error of the statement, which would hold its queue for ever.
ALTER TABLE orders MODIFY reason VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL;
