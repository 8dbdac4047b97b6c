#!/bin/bash
# Run once by the image of MySQL, after it has made user and schema: tests make schemas of their own,
# all named t_<something>.
set -eu
MYSQL_PWD=$MYSQL_ROOT_PASSWORD mysql -u root <<SQL
GRANT ALL ON \`t\\_%\`.* TO '$MYSQL_USER'@'%';
SQL
